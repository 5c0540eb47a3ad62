"""The workbench watches runs and starts them. It reads run folders and never loads torch."""

"""Send messages about a run to users who are not watching it: the receivers, the format and the sending."""

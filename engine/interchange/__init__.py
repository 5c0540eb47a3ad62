"""Import runs of other tools as run folders, and export run folders to the formats of other tools: `engine import`,
`engine export`."""

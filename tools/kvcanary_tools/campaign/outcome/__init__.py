"""What a campaign has come to: the matrix of what was found, its bars, and how both are written and merged."""

"""What the commands say about dumps: tables, stories, timelines and pages."""

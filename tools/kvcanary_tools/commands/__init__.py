"""One file per command; each exports `command` and imports torch only when it runs."""

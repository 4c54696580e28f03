"""The `kvcanary` command: reports, demonstrations and measurements on top of engine and canary."""

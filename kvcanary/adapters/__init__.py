"""The canary inside engines that others wrote: a folder for each host, and in `observed` what watched pools need."""

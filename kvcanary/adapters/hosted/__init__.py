"""Engines that others wrote: what their adapters share, whichever engine it is.

`replacements` hooks methods of instances and undoes it, `guard` lets none of them end a request, `output_gate` holds
results back until the counter of findings was looked at, `ranks` lets several processes tell a finding once, `metrics`
is what Prometheus says of it, and `handle` puts them together over one canary.
Which releases fit is said by `kvcanary.adapters.compatibility`.
"""

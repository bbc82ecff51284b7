"""Histories of runs with faults: what clients did and what was done to servers; checks over them; a drawing of each.

`model` has the parts. `appends`, `groups` and `containers` make them out of what workloads note; `recorder` takes notes
of a cluster on loopback. `transactions`, `availability` find what must not happen, beside `append_checker` and
`group_checker`; `timeline` draws a history as an SVG, and `artifacts` says where that goes.
"""

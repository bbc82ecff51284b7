"""Histories of runs with faults: what clients did and what was done to servers; checks over them; a drawing of each.

`model` has the parts. `workloads` and `containers` make histories of what workloads note; `recorder` takes notes of a
cluster on loopback. `transactions` and `availability` find what must not happen, as `append_checker` and
`group_checker` do; `timeline` writes a history as a text into `artifacts/timelines/`.
"""

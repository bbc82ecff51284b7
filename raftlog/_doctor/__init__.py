"""Finds problems of a cluster: `collect` asks the cluster, `checks` examine the answers and are pure.

picture = collect(admin)            # picture.py: the answers, and the questions without one
report = examine(picture, CHECKS)   # report.py: the findings of every check whose input is known
"""

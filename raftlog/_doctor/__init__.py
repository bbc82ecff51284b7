"""What is wrong with a cluster: `collect` asks, `checks` look at what was answered, without asking anybody.

picture = collect(admin)            # picture.py: what is known, and what is not, and why
report = examine(picture)           # report.py: each check of checks/ that has what it needs
"""

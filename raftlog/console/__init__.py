"""The console: a web page where people look at their cluster. `raftlog console` serves it; docs/console.md.

__main__.py    the process: what `raftlog console` becomes
app.py         the web application: routes, sessions' cookie, security headers, live updates
access.py      who looks: logins, sessions, tokens against forged requests
view.py        one user's view of the cluster: answers of brokers, asked for once in two seconds at most
pages.py       the pages: each turns a request into a template and its values
actions.py     the changes: each checks a form, asks the cluster, and says what happened
rebalance.py   a plan of moves that is carried out, with progress
messages.py    reading, filtering and showing records
templates/, static/   HTML (Jinja2), styles and the scripts

It stands on the SDK alone, so a user has no rights here that the brokers do not give.
"""

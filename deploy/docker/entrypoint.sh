#!/bin/sh
# Runs `raftlog` with the given arguments, under tini where the base has it. Without it, `docker run --init` adds one;
# a server also does well as process 1: it handles SIGTERM itself and starts no other processes.
if [ "$$" = 1 ] && command -v tini >/dev/null; then
    exec tini -- raftlog "$@"
fi
exec raftlog "$@"

"""`./dev demo`: real records through Spark into raftlog and back, compared one by one."""

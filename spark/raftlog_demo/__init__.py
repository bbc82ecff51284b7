"""`./dev demo`: streams real records through Spark into raftlog and back, and compares them one by one."""

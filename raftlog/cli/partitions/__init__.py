"""`raftlog partition`: elections and reassignments; moving.py plans and throttles moves, health.py names problems."""

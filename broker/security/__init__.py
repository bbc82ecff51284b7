"""Who calls, and what they may do: authentication, permissions, the audit log."""

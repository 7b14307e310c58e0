"""Stand-ins for ClusterD and its clients, written from their observable behaviour."""

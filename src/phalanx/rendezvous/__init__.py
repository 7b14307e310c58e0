"""Who takes part in a job of several nodes, as which ranks, under whose word. Pure.

``model`` has the vocabulary, ``job`` the machine of the coordinator, ``election`` the
one that moves the coordinator. No I/O, clock, thread or log in this room.
"""

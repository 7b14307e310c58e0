"""The shell around ``phalanx.rendezvous`` for one job of several nodes.

``node.CoordinatorNode`` is what an agent has of it: a coordinator of its own where it is the
one, a link to the other's where it is not. ``server`` answers on the network, ``hub`` runs the
pure machine, ``wire`` puts its words into bytes. Needs grpcio and protobuf, unlike the agent.
"""

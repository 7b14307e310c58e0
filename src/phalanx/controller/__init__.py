"""The controller: the recovery protocol's server for many jobs.

``hub`` holds jobs, timers and listeners around :mod:`phalanx.recovery`; ``journal`` is what
survives; ``service`` and ``server`` are the gRPC shell; ``access`` decides who may call.
Needs the ``control`` extra (grpcio, protobuf).
"""

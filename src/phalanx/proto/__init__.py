"""Wire messages of the recovery protocol.

The ``*_pb2`` modules are generated from the ``.proto`` files beside them by ``python -m
phalanx.proto.generate`` and checked in. They live in a descriptor pool of their own, so
that another copy of the same messages (the vendor's client, a second version of this
package) may be loaded into the same process. They need ``protobuf``; nothing else does.
"""

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""The largest message either end accepts (ClusterD's receive limit)."""

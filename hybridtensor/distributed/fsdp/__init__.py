"""FSDP2: shards of converted weights are quantized, and only the bytes of the face that is needed are gathered.

Objects of an all-gather, from the weight to what FSDP2 sends:

| object | of | lives as long as |
|---|---|---|
| ``Shard`` | one weight: its plan, its amaxes over all ranks, its gathered faces | the weight |
| ``WeightGroup`` | the weights that FSDP2 gathers together | the FSDP2 group |
| ``Gather`` | a group and the faces that forward or backward requests of it | the group |
| ``Bundle`` | the weights of a ``Gather`` whose bytes are sent together | the group |
| ``Payload`` | the bytes that this rank sends | the group, until a recipe changes or a shard is replaced |
| ``WeightPayload`` | the part of one weight in a payload | the payload |
| ``PreparedGather`` | the bytes of a payload that a ``Gather`` sends, and buffers for all ranks' | the payload |
"""

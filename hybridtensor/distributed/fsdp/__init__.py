"""FSDP2: shards of converted weights are quantized, and only the bytes of the face that is needed are gathered."""

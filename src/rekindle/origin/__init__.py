"""KV at a remote place: published as plain files with a signed manifest, read by clients that trust nothing."""

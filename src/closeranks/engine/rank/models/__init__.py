"""Models. Each declares the planes of its pages; pool, transfer and checksum know nothing else of it."""

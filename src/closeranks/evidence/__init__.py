"""Evidence: reading bundles, loading what strangers wrote, and redaction."""

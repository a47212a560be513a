"""Fine-tuned variants of the bundled model: a family to share experts among, and its quality."""

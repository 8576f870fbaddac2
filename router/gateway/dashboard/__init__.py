"""The dashboard: what the cluster does, for people. It only reads, and does nothing while nobody looks."""

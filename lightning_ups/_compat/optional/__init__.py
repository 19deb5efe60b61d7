"""Optional packages and libraries."""

"""Formats of files that nobody vouches for: read with limits, or refused in one sentence."""

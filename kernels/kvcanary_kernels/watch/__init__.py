"""Engines that are only watched: block tables walked, and their bytes read again."""

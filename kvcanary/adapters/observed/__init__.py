"""Pools of an engine that is only watched: nobody tells of grants and frees, so records speak for themselves."""

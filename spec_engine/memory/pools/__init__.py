"""Pools of K, V and states, and the maps in front of them."""

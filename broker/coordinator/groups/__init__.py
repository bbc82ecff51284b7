"""Consumer groups (KIP-848): the coordinator's pure core, which decides and replays its decisions.

commands ─▶ coordinator ─▶ membership, rebalance, offsets, describe ─▶ draft ─▶ records ─▶ replay ─▶ group
"""

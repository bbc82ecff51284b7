"""Consumer groups: the coordinator's core. Pure: it decides, and what it decided is replayed (KIP-848).

commands ─▶ coordinator ─▶ membership, rebalance, offsets, describe ─▶ draft ─▶ records ─▶ replay ─▶ group
"""

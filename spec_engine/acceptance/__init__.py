"""From the target's logits over a draft tree to the tokens that leave: pure functions over tensors.

settings -> penalties -> distribution (with coins) -> one walk: match, tree sampling or chain rejection -> log-probs,
stops. No function here waits for the device, except where it says that it returns to the host.
"""

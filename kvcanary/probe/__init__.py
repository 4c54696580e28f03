"""What attention really reads: known entries, one query over them, and what the answer says was read."""

"""How the packaged model came to be: corpus, tokenizer, target, heads, export, evaluation.

Run as `python -m kvcanary_tools.train STAGE`; every stage resumes, none takes more than nine minutes.
"""

"""The canary inside a real SGLang on a CPU: a scheduler in a process of its own, driven turn by turn."""

"""The engine behind HTTP: OpenAI's completions and chat, health, metrics, and the canary's debug pages.

One thread owns the engine (`worker`); an asyncio side talks to it by queues. Needs the extra `serve`.
"""

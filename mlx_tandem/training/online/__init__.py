"""The online loop: collect, score, update, validate and publish, while a server goes on serving."""

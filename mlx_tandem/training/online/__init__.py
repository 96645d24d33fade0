"""The online loop: collect, score, update, validate, publish, beside a server that goes on serving"""

"""`tandem demo`: the built-in model at work, live"""

"""What the demo needs around the shop: a mail server, a customer, a scoreboard, and leashes for processes.

Nothing of this is needed to use django_pgjobs; read `shop/` for that.
"""

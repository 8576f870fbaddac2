"""`headwater bench peers`: the same work on Headwater and on other servers of this machine."""

"""Default prompts of the demo: one beginning in the manner of Python's reference, several ways on."""

PREFIX = """\
Objects, names and statements
*****************************

Every value in a program is an object. An object has a type, which says what operations it supports. Names refer to objects: an assignment
statement binds a name to an object in the current scope, and the "del" statement removes the binding again. A name that is not bound
raises a "NameError" exception.

"""
PROMPTS = tuple(
    PREFIX + ending
    for ending in ('The "return" statement ', 'The "import" statement ', "Called when the attribute ", "Changed in version 3.", "If an exception ")
)

def draw(name, found, path):
    pass

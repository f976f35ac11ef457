"""A parcel service: what an item weighs, and what its postage is. A question needs both, one after the other."""

WEIGHTS = {  # grams, packed
    "alarm clock": 420, "atlas": 1850, "backpack": 980, "basket": 640, "birdhouse": 1500, "blanket": 1320,
    "board game": 1140, "boot": 760, "bowl": 550, "bracelet": 90, "brush": 130, "bucket": 870, "camera": 690,
    "candle": 310, "chess set": 1260, "coat": 1730, "cookbook": 1080, "cushion": 480, "dictionary": 1410, "drum": 2300,
    "fan": 1900, "flashlight": 280, "flute": 520, "frying pan": 1620, "globe": 1240, "guitar": 3400, "hammer": 830,
    "hat": 210, "helmet": 790, "iron": 1580, "jacket": 1120, "kettle": 1370, "kite": 340, "lamp": 1460, "lantern": 910,
    "map": 150, "microscope": 2700, "mirror": 1820, "mug": 390, "necklace": 110, "notebook": 260, "pillow": 720,
    "puzzle": 570, "radio": 1170, "rug": 2900, "scarf": 240, "skateboard": 2600, "sweater": 610, "teapot": 940,
    "telescope": 3100, "tent": 2800, "toaster": 1690, "toolbox": 3300, "trumpet": 1530, "umbrella": 450, "vase": 1030,
    "violin": 1960, "wallet": 180, "watch": 170, "wok": 1790,
}  # fmt: skip
ZONES = {  # a fixed price and a price for each started kilogram, in euros
    "Austria": (5, 1), "Belgium": (4, 2), "Canada": (12, 6), "France": (6, 2), "Greece": (8, 3), "India": (14, 5),
    "Ireland": (7, 3), "Japan": (15, 7), "Kenya": (13, 8), "Norway": (9, 4), "Peru": (16, 6), "Spain": (6, 3),
}  # fmt: skip


def weigh(item: str) -> str:
    """Look up what an item weighs in grams.

    Args:
        item: The item's name, such as teapot
    """
    if item not in WEIGHTS:
        raise ValueError(f"no item is called {item!r}")
    return str(WEIGHTS[item])


def postage(grams: int, country: str) -> str:
    """Compute the postage of a parcel in euros.

    Args:
        grams: What the parcel weighs
        country: Where it goes
    """
    if country not in ZONES or not 0 < grams <= 10_000:
        raise ValueError("expected one of the countries and 1 to 10000 grams")
    fixed, per_kilogram = ZONES[country]
    return str(fixed + per_kilogram * -(-grams // 1000))


TOOL_FUNCTIONS = [weigh, postage]

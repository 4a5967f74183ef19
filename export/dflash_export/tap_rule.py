"""Which target layers are tapped when no drafter states them."""


def default_target_layer_ids(num_target_layers: int, num_taps: int = 5) -> list[int]:
    """The authors' default rule, kept within small models.

    Evenly spaced from layer 1 to the third from the end, rounded half to even (`build_target_layer_ids` of the
    reference package); a single tap is the middle layer. Models with fewer layers than taps tap every layer.

    Args:
        num_target_layers: Decoder layers of the target, at least 1.
        num_taps: Taps wanted; the rule uses the number of drafter layers, 5 in the paper.

    Returns:
        Ascending 0-based layer ids, unique.
    """
    if num_taps >= num_target_layers:
        return list(range(num_target_layers))
    if num_taps == 1:
        return [num_target_layers // 2]
    start, end = min(1, num_target_layers - 1), max(1, num_target_layers - 3)
    ids = {round(start + i * (end - start) / (num_taps - 1)) for i in range(num_taps)}
    return sorted(ids)

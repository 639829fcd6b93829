"""What people answer, and what a checker says of it: changes of a solution's text, and a part of the hint."""

# exercise: (what stands in the solution, what stands there instead, the hint)
MISTAKES: dict[str, list[tuple[str, str, str]]] = {
    "prefetcher": [
        ("in self.batches:", "in list(self.batches):", "nothing is read while the loop computes"),
        ("queue.Queue(self.ahead)", "queue.Queue()", "9 batches were read while the loop held the first"),
        ('            ready.put(("error", error))', '            ready.put(("end", None))', "as if all were well"),
        ('            ready.put(("error", error))', "            pass", "nobody heard of it"),
        ('            ready.put(("end", None))\n', "", "who says that no more batch comes"),
        (
            "            stop.set()\n"
            "            while not ready.empty():  # it may wait for a place, and needs one more to say that it ended\n"
            "                ready.get()\n"
            "            reader.join()\n",
            "            pass\n",
            "live on after a loop that was left",
        ),
        (
            "            while not ready.empty():  # it may wait for a place, and needs one more to say that it ended\n"
            "                ready.get()\n",
            "",
            "a loop that is left waits for ever",
        ),
        ("        reader.start()", "        reader.run()", "the loop waits for ever"),
        (
            "        ready, stop = queue.Queue(self.ahead), threading.Event()",
            "        yield from self.batches\n        return",
            "nothing is read while the loop computes",
        ),
    ],
    "collective_gradients": [
        ("        return x\n\n    @staticmethod\n    def backward(ctx, grad: Tensor) -> Tensor:\n        return grad",
         "        return x\n\n    @staticmethod\n    def backward(ctx, grad: Tensor) -> Tensor:\n"
         "        grad = grad.contiguous()\n        dist.all_reduce(grad)\n        return grad",
         "Reduce: the gradient is {size} times too large"),
        ("        x = x.clone(memory_format=torch.contiguous_format)\n        dist.all_reduce(x)",
         "        dist.all_reduce(x.data)", "Reduce changes its input"),
        ("        dist.reduce_scatter_tensor(own, grad.contiguous())",
         "        own.copy_(grad.chunk(ctx.size)[dist.get_rank()])", "lacks what the other ranks' uses give"),
        ("reduce_scatter_tensor(own, grad.contiguous())",
         "reduce_scatter_tensor(own, grad.contiguous(), op=dist.ReduceOp.AVG)", "{size} times too small: a sum"),
        ("        return grad.chunk(ctx.size)[ctx.rank], None, None",
         "        own = grad.new_empty(grad.shape[0] // ctx.size, *grad.shape[1:])\n"
         "        dist.reduce_scatter_tensor(own, grad.contiguous())\n        return own, None, None",
         "Gather: the gradient is {size} times too large: all ranks do the same"),
        ("grad.chunk(ctx.size)[ctx.rank]", "grad.chunk(ctx.size)[0]", "whose is it?"),
        ("        dist.reduce_scatter_tensor(own, grad.contiguous())",
         "        grad = grad.contiguous()\n        dist.all_reduce(grad)\n"
         "        own.copy_(grad.chunk(ctx.size)[dist.get_rank()])",
         "all_gather_into_tensor and reduce_scatter_tensor are enough"),
    ],
    "tensor_parallel_mlp": [
        ("dist.all_reduce(x)", "pass", "y is a part of a sum"),
        ("        return Reduce.apply(", "        x = Reduce.apply(", "forward returns nothing"),
        ("dist.all_reduce(grad)", "pass", "lacks what the other ranks' hidden units give"),
        ("        return grad\n\n\nclass ParallelMLP", "        return {size} * grad\n\n\nclass ParallelMLP",
         "the gradient of x is {size} times too large"),
        ("self.fc2_weight)) + self.fc2_bias", "self.fc2_weight, self.fc2_bias))", "fc2's bias {size} times"),
        ("fc2.weight.chunk(size, dim=1)", "fc2.weight.chunk(size, dim=0)", "B is cut along its inputs"),
    ],
    "context_attention": [
        ("    k, v = all_gather(torch.stack([k, v]), -2, dist.group.WORLD)\n", "", "its own rank only"),
        ("    k, v = all_gather(torch.stack([k, v])", "    q, k, v = all_gather(torch.stack([q, k, v])",
         "are these the rows of all queries?"),
        (", attn_mask=mask)", ")", "queries look at padding"),
        ("    k, v = all_gather(torch.stack([k, v]), -2, dist.group.WORLD)",
         "    k, v = (all_gather(x, -2, dist.group.WORLD) for x in (k, v))", "one all-gather is enough"),
        ("    k, v = all_gather(torch.stack([k, v]), -2, dist.group.WORLD)",
         "    parts = [torch.empty_like(torch.stack([k, v])) for _ in range(size)]\n"
         "    dist.all_gather(parts, torch.stack([k, v]))\n    k, v = torch.cat(parts, -2)",
         "Does the gathering have a gradient?"),
    ],
    "missing_reduction": [
        ("reduce(target.square().sum((1, 2)), dist.group.WORLD)", "target.square().sum((1, 2))",
         "what do all layers have behind them?"),
        ("reduce(target.square().sum((1, 2)), dist.group.WORLD)",
         "dist.get_world_size() * target.square().sum((1, 2))",
         "right only where the tokens of all ranks weigh the same"),
        ("(error / size).sqrt().mean()", "(error / size).sqrt().mean() / dist.get_world_size()",
         "what do all layers have behind them?"),
        ("        dist.all_reduce(p.grad)", "        pass", "these gradients are off by: fc2_bias"),
        ("(found * expected).sum() / expected.square().sum()", "(found / expected).mean()", "comes nearest"),
        ("    for p in model.replicas():", "    for p in model.parameters():", "fc1_weight"),
    ],
    "owned_adam": [
        (", op=dist.ReduceOp.AVG", "", "the gradient is {size} times the mean: a sum"),
        ("        self.own.grad = mean\n", "", "self.own has no gradient"),
        ("            p.data.copy_(x.view_as(p))", "            pass", "what the owners computed must come back"),
        ("row.chunk(self.size)[self.rank].clone()", "row.clone()", "owns 36 numbers of 35"),
        ("chunk(self.size)[self.rank]", "chunk(self.size)[self.rank - 1]", "is not its stretch of the row"),
        ("        self.own.grad = mean\n", "        self.own.grad = mean\n        dist.all_reduce(torch.ones(1))\n",
         "one reduce-scatter and one all-gather are enough"),
    ],
    "frozen_value": [
        ("        self.x.copy_(x)\n        self.y.copy_(y)\n",
         "        if not self.is_recorded:\n            self.x, self.y = x, y\n", "each replay takes the first batch"),
        ("        self.lr.fill_(lr)\n", "        self.lr = lr\n", "the learning rate is frozen"),
        ("            self.t.add_(1)\n", "            self.t = 1\n", "the number of the step is frozen"),
        ("        self.graph.replay()\n        return",
         "        else:\n            self.graph.replay()\n        return",
         "the first call changes no weight"),
        ("        return self.loss.clone()", "        return self.loss", "the losses of all steps are that of the"),
        ("            self.is_recorded = True\n", "", "made 5 recordings"),
        ("            self.loss.copy_(loss)\n", "            self.loss.fill_(loss.item())\n", "the host reads a value"),
    ],
    "safe_checkpoint": [
        ("    new = folder / f\"{NAME}.new\"", "    new = folder / NAME", "neither the new nor the old one is whole"),
        ("    os.replace(new, folder / NAME)",
         "    (folder / NAME).unlink(missing_ok=True)\n    os.replace(new, folder / NAME)",
         "load_checkpoint finds none"),
        ("        os.fsync(file.fileno())  # from the system to the disk\n", "", "the bytes of its file were not"),
        ("        file.flush()  # from Python to the system\n", "", "the bytes of its file were not"),
        ("    new = folder / f\"{NAME}.new\"", "    new = folder / f\"{NAME}.{step}\"", "the disk fills up"),
        ("        torch.save({\"step\": step, \"state\": state}, file)\n",
         "        try:\n            torch.save({\"step\": step, \"state\": state}, file)\n        except OSError:\n"
         "            return\n",
         "as if all were well"),
        ("        return None\n    return found[\"step\"]", "        return None\n    return 0",
         "(step, state) was expected"),
    ],
    "choose_layout": [
        ("RANKS = 256", "RANKS = 250", "whole nodes have 4 GPUs each"),
        ("RANKS = 256", "RANKS = 128", "hours, and 20 there are"),
        ("RANKS = 256", "RANKS = 1024", "64 samples do not divide among 256 copies of the model"),
        ("--context_parallel=4", "--context_parallel=3", "are not so many copies of tp 1 x cp 3"),
        ('"--context_parallel=4", "--cp_attention=ulysses", ', "", "64 samples do not divide among 256 copies"),
        ('"--context_parallel=4", "--cp_attention=ulysses", ', '"--tensor_parallel=4", ', "those that send less"),
        ('FLAGS = [', 'FLAGS = ["--embed_dim=384", ', "embed_dim would make it another training"),
    ],
    "late_rank": [
        (" - sum(wait[\"dur\"] for wait in waits if 0 <= wait[\"ts\"] - span[\"ts\"] < span[\"dur\"])", "",
         "has it the waiting for other ranks in it?"),
        ("statistics.median(own_times", "statistics.fmean(own_times", "stumbles in one"),
        ("    return late, max(PHASES, key=lambda phase: times[late][phase] - usual[phase])",
         "    return late, max(PHASES, key=lambda phase: times[late][phase])", "the rank is right"),
        ("    if totals[late] < (1 + MATTERS) * sum(usual.values()):\n        return None\n", "", "or for once"),
        ("    late = max(range(len(ranks)), key=lambda rank: totals[rank])",
         "    waits = [sum(e[\"dur\"] for e in of if e[\"name\"] == COLLECTIVE) for of in ranks]\n"
         "    return waits.index(max(waits)), \"backward\"",
         "that rank waits in its collectives, so it is early"),
    ],
}  # fmt: skip

"""Images/s of random batches read from shards, against decoding and resizing the same JPEGs with Pillow each time.

    python tests/bench/images.py

One process reads, and one decodes, both files that are in the page cache already. The JPEGs have 500x375 pixels, about
ImageNet's mean, and 224x224 are stored. A training host without shards decodes in as many processes as it has cores.
"""
import io
import os
import random
import subprocess
import sys
import tempfile
import time

import numpy as np
from PIL import Image

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [ROOT, os.path.join(ROOT, 'data')]
from nano.images import Images  # noqa: E402
from nano.loader import example_at  # noqa: E402

N, SIZE = 1000, 224


def jpeg(rng: np.random.Generator) -> bytes:
    """A picture of 500x375 with detail at several scales: about 100 kB, as photographs of ImageNet have."""
    picture = np.zeros((375, 500, 3))
    for width in (4, 16, 64, 250):
        noise = Image.fromarray(rng.integers(0, 256, (width * 3 // 4, width, 3), np.uint8))
        picture += np.asarray(noise.resize((500, 375), Image.Resampling.BICUBIC)) / 4
    out = io.BytesIO()
    Image.fromarray(picture.astype(np.uint8)).save(out, 'JPEG', quality=90)
    return out.getvalue()


def rate(step, seconds: float = 2) -> float:
    step()
    began, n = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        n += step()
    return n / elapsed


def main():
    with tempfile.TemporaryDirectory() as folder:
        rng, paths = np.random.default_rng(0), []
        for i in range(N):
            paths.append(os.path.join(folder, 'in', f'c{i % 10}', f'{i}.jpg'))
            os.makedirs(os.path.dirname(paths[-1]), exist_ok=True)
            with open(paths[-1], 'wb') as f:
                f.write(jpeg(rng))
        kb = sum(map(os.path.getsize, paths)) / N / 1000
        out, began = os.path.join(folder, 'out'), time.perf_counter()
        subprocess.run([sys.executable, os.path.join(ROOT, 'data', 'images.py'), os.path.join(folder, 'in'), '--out',
                        out, '--size', str(SIZE), '--val_fraction', '0', '--shard_images', '150'], check=True,
                       stdout=subprocess.DEVNULL)
        print(f'{N} JPEGs of {kb:.0f} kB; data/images.py: {N / (time.perf_counter() - began):.0f} images/s on '
              f'{len(os.sched_getaffinity(0))} cores, with its start')
        pick = random.Random(0)

        def decode():
            with Image.open(pick.choice(paths)) as image:
                width, height = image.size
                left = (width - height) // 2
                np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC, (left, 0, left + height, height)))
            return 1

        images, position = Images(out, 'train'), 0

        def read(batch):
            nonlocal position
            images.read(example_at(position + np.arange(batch), len(images), 0))
            position += batch
            return batch

        base = max(rate(decode) for _ in range(2))  # the better of two turns: the machine may have other work
        print(f'Pillow: {base:.0f} images/s')
        for batch in (32, 128, 512):
            ours = max(rate(lambda: read(batch)) for _ in range(2))
            print(f'batches of {batch}: {ours:.0f} images/s, {ours / base:.0f} times')


if __name__ == '__main__':
    main()

"""Pictures as SVG files, which every browser shows: images with their labels, and a confusion matrix."""
import base64
import html
import re
import struct
import zlib

import numpy as np


def escape(text: str) -> str:
    """For XML, which has no way to write control characters and halves of surrogates."""
    return html.escape(re.sub('[\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff]', '?', text))


def png(image_HWC: np.ndarray) -> bytes:
    """uint8 [H, W, 1 or 3] -> a PNG file (https://www.w3.org/TR/png-3: signature, then chunks with their CRC)."""
    H, W, C = image_HWC.shape
    lines = np.concatenate([np.zeros((H, 1), np.uint8), image_HWC.reshape(H, W * C)], 1)  # each begins with filter 0

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))

    head = struct.pack('>IIBBBBB', W, H, 8, {1: 0, 3: 2}[C], 0, 0, 0)
    return (b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', head) + chunk(b'IDAT', zlib.compress(lines.tobytes())) +
            chunk(b'IEND', b''))


def report(title: str, images_NHWC: np.ndarray, true_N: np.ndarray, predicted_N: np.ndarray, confidence_N: np.ndarray,
           names: list[str], confusion_KK: np.ndarray | None) -> str:
    """A grid of images with what they show and, in red, what they were taken for where that is wrong, each with the
    model's confidence in its answer; beside it the confusion matrix: rows are true classes, columns predicted ones,
    each row's shares as shades. None leaves it out."""
    size, text, columns = 64, 22, 8
    rows = -(-len(images_NHWC) // columns)
    parts = [f'<text x="8" y="20" font-size="14">{escape(title)}</text>']
    for i, (image, true, predicted, sure) in enumerate(zip(images_NHWC, true_N, predicted_N, confidence_N)):
        x, y = 8 + (i % columns) * (size + 12), 32 + (i // columns) * (size + text + 8)
        data = base64.b64encode(png(image)).decode()
        parts.append(f'<image x="{x}" y="{y}" width="{size}" height="{size}" style="image-rendering:pixelated" '
                     f'href="data:image/png;base64,{data}"/>')
        answer = f'{names[predicted][:10]} {sure:.0%}' if true != predicted else f'{sure:.0%}'
        parts.append(f'<text x="{x}" y="{y + size + 10}">{escape(names[true][:12])}</text>')
        color = '#888' if true == predicted else '#c00'
        parts.append(f'<text x="{x}" y="{y + size + 20}" fill="{color}">{escape(answer)}</text>')
    width, height = 8 + columns * (size + 12), 40 + rows * (size + text + 8)
    if confusion_KK is not None:
        K, left, top = len(names), width + 90, 110
        cell = max(2, min(28, 600 // K))
        for a in range(K):
            for b in range(K):
                n = int(confusion_KK[a, b])
                share = n / max(1, confusion_KK[a].sum())
                grey = round(255 * (1 - share))
                where = f'x="{left + b * cell}" y="{top + a * cell}"'
                parts.append(f'<rect {where} width="{cell}" height="{cell}" fill="rgb({grey},{grey},255)"/>')
                if n and cell >= 20:
                    parts.append(f'<text x="{left + b * cell + 2}" y="{top + a * cell + cell - 9}" font-size="8" '
                                 f'fill="{"#fff" if share > .6 else "#000"}">{n}</text>')
            if cell >= 8:
                parts.append(f'<text x="{left - 6}" y="{top + (a + 1) * cell - cell // 3}" text-anchor="end">'
                             f'{escape(names[a][:14])}</text>')
                parts.append(f'<text transform="translate({left + a * cell + cell // 2},{top - 6}) rotate(-60)">'
                             f'{escape(names[a][:14])}</text>')
        parts.append(f'<text x="{left}" y="20">confusion: rows are true classes, columns predicted ones</text>')
        width, height = left + K * cell + 60, max(height, top + K * cell + 20)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
            f'font-size="9"><rect width="100%" height="100%" fill="#fff"/>\n' + '\n'.join(parts) + '\n</svg>\n')

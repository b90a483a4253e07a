# An image for clusters and laptops, with or without GPUs: PyTorch's wheels bring CUDA with them.
#
#     docker build -t kilogpt .
#     docker run --rm -it kilogpt                                          # README's first command, on CPUs
#     docker run --rm -it --gpus=all --ipc=host -v "$PWD/out:/mnt/out" kilogpt \
#         python train.py config/train_shakespeare_char.py --out_dir=/mnt/out/shakespeare
FROM python:3.11.14-slim-bookworm

# torch.compile compiles with g++ on CPUs and with gcc on GPUs.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# Not root, as many clusters require. Containers that mount volumes write to them as this user, 1000.
RUN useradd --uid=1000 --create-home kilogpt
WORKDIR /kilogpt

# The requirements come before our files, so that a change of these does not install everything again.
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt

RUN chown kilogpt /kilogpt
USER kilogpt
COPY --chown=kilogpt . .
ENV PYTHONUNBUFFERED=1
CMD ["sh", "-c", "python train.py config/quickstart.py && python sample.py --out_dir=out-quickstart"]

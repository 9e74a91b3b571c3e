# docker build -f deploy/vllm.Dockerfile -t rekindle-vllm .
# vLLM's own image with Rekindle beside it: `vllm serve` finds the connector by its module path.
ARG VLLM=v0.32.0
FROM vllm/vllm-openai:${VLLM}
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir ".[vllm,redis,s3,crypto]"
ENV REKINDLE_HOME=/data
VOLUME /data
